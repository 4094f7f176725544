"""`nanotf.data.feeding.feed`: feeds a channel's pipes, as `python -m nanotf.data.feed` does."""

from nanotf.sagemaker.pipes.channel_feeder import Feed, feed

__all__ = ["Feed", "feed"]
