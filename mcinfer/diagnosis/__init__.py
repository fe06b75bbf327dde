"""What mcinfer needs of this machine, whether it is there, and what to do where it is not."""
