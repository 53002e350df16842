"""Where checkpoints lie besides the disk: object stores, reached through `obstore`.

A process of its own uploads what has become durable; loads read byte ranges. No torch.
"""
