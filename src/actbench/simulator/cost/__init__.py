"""The time of a step that is never computed: what each operator does, and how long a device needs for it."""

from __future__ import annotations
