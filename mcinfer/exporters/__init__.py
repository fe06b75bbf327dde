"""What masters say of themselves, as other systems collect it: one module for each, imported when wanted."""
