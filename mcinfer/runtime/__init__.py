"""The master's side of processes: its loop, its delivery thread, its workers."""
