"""From the command line to a frozen config, and from a config to JSON."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    as_json="config_hash to_json",
    flags="REQUIRED parse_args parse_cli plug_in",
    reporting="reporting_errors",
    values="JsonObject resolve_path",
)
