"""The processes side of a master: its loop, its delivery thread, its workers."""
