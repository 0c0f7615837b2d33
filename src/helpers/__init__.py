"""What the book's chapters share: checks, timings, figures, data, and the Kalman gradients."""
