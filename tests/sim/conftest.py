"""The simulation logs nothing unless a test fails, and then only what pytest captured."""

from __future__ import annotations

import logging

import structlog

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
