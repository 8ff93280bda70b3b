"""What happens when a rank dies, is late, or stays silent."""
