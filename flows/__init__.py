"""When and how often. The only folder that imports prefect."""
