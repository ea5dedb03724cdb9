"""Pixels: decoding, the packed cache, batched augmentation. Imports only tasks.core."""
