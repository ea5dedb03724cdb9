"""What Trainyard does: one stage per file, the library in the folders under them. Nothing here imports Prefect."""
