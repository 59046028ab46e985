"""What the suites stand on: engines, model repositories, the real tritonserver, clients, expected answers."""
