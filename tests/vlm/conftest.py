"""A browser for the tests of images on the page, and fixtures of tests in which heads propose."""

from browsers import browser  # noqa: F401 - a fixture
from draft_fixtures import drafts_pay, only_drafts  # noqa: F401 - fixtures
