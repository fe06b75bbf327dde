"""The package's metadata is in setup.cfg."""

from setuptools import setup

setup()
