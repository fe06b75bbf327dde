"""Decides what to do next: events in, actions out. Pure: no sockets, threads, clocks or processes."""
