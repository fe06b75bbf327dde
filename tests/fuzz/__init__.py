"""Fuzzing of what messages do: the codec, and the handling of messages in a master and in a worker."""
