"""What a report looks like: figures, tables, plots, pages, and two reports beside each other."""
