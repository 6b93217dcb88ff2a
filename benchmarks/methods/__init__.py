"""What problems are given to: our kernels, peers, and what one writes by hand."""
