"""One module for each exercise; `EXERCISE` is its name, its function, and its cases."""
