"""The training engine and its parts. Imports only tasks.images and tasks.core."""
