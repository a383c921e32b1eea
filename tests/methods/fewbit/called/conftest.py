from __future__ import annotations

import pytest

pytest.register_assert_rewrite("activationcalls")  # its failures show both values, as those of tests do
