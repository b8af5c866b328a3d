"""Every name of Flower that is not in its public packages, in one place: look here first when Flower moves on."""

from __future__ import annotations

from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

__all__ = ["DecodeError", "ErrorCode", "ObjectPushError"]
