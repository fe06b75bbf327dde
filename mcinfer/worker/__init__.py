"""The worker process: its entry, the loop that serves its master, and joined runs of several requests."""
