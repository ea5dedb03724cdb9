"""The contracts every stage shares: config, artifacts, files, errors, child processes. Imports nothing else of ours."""
