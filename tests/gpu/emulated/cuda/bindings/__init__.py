"""Stands before the real package on ``sys.path``; see `driver`."""
