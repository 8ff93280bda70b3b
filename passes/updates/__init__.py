"""Updates of whole matrices, divided over ranks."""
