"""The version of tracegraph."""

VERSION = "0.1.0"
