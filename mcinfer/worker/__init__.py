"""The child process: its entry, the loop that serves its master, and runs of several requests at once."""
