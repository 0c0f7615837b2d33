"""What make and the tests run: notebooks, the equation index, the book's rules for itself."""
