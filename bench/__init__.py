"""Every claim of speed and accuracy as one command: ``python -m bench.NAME`` writes bench/results/NAME.md.

Speed is measured here and asserted nowhere: machines are noisy, so results carry hardware, versions, runs and medians.
"""
