"""Arrays and shared memory: plans, frames, requests and their futures."""
