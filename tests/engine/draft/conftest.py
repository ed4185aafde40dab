"""Fixtures of tests in which heads and drafters propose."""

from draft_fixtures import drafts_pay, only_drafts  # noqa: F401 - fixtures
