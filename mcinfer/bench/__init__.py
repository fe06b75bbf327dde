"""The benchmark runner: ways of running one model, side by side under the same loads."""
