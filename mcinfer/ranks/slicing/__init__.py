"""Cutting one ONNX model into a slice for each rank. Only this package imports `onnx`."""
