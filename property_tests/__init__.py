"""What must hold of the sample adapter for every rollout, told as properties. Start with README.md."""
