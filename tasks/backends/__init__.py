"""The only files that import dvc or mlflow."""
