"""The served classifier. Imports tasks.images.decode and nothing else of ours; no torch."""
