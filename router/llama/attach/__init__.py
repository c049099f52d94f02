"""What is learned of a backend when it comes up: probe, namespace, diagnosis; up or down since."""
