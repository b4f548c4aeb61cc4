"""harnessrl: harnessed agentic reinforcement learning in pure PyTorch.

``harnessrl.adapter`` is the core (numpy only). The other rooms load what they need when they are imported.
"""

__version__ = "0.1.0"
