"""What an earlier version of meshc saved (`saved.tar.xz`), which every later one reads to equal values; `write.py` wrote it."""
