"""Data sets, their cache and their division among clients (`open_client_data` is the way in)."""

from protofl_common.data.clients import ClientData, open_client_data
from protofl_common.data.raw import DataError
from protofl_common.data.sources import check_data_settings

__all__ = ["ClientData", "DataError", "check_data_settings", "open_client_data"]
