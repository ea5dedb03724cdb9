"""The schedules of prefect.yaml under the clock changes of a leap year, by the code of Prefect's own scheduler."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from conftest import ROOT
from prefect.server.schemas.schedules import CronSchedule
from ruamel.yaml import YAML

YEAR = [date(2028, 1, 1) + timedelta(days) for days in range(366)]
ZONES = ("Europe/London", "America/New_York", "Australia/Lord_Howe")
"""Clocks that skip and repeat the hour from one to two, the one from two to three, and half an hour at two."""


def schedules() -> list[dict[str, Any]]:
    deployments: list[dict[str, Any]] = YAML(typ="safe").load(ROOT / "prefect.yaml")["deployments"]
    return [schedule for deployment in deployments for schedule in deployment.get("schedules", [])]


def test_every_schedule_is_on() -> None:
    """Projects of other tests switch theirs off."""
    assert len(schedules()) == 3
    assert all(schedule["active"] for schedule in schedules())


def daily_crons() -> set[str]:
    crons = {schedule["cron"] for schedule in schedules() if "cron" in schedule}
    return {cron for cron in crons if cron.split()[0].isdigit() and cron.split()[1].isdigit() and cron.split()[2:] == ["*", "*", "*"]}


@pytest.mark.parametrize("zone", ZONES)
def test_a_daily_schedule_fires_once_on_each_local_day_of_a_leap_year(zone: str) -> None:
    """The scheduler looks ahead in short windows, again and again; what it saw before it knows by its time."""
    crons = daily_crons()
    assert "30 2 * * *" in crons
    for cron in crons | {"30 1 * * *", "45 1 * * *"}:  # times that the clock changes skip or repeat
        assert Counter(moment.date() for moment in fired(cron, zone)) == Counter(YEAR), cron


def fired(cron: str, zone: str) -> set[datetime]:
    clock = ZoneInfo(zone)
    schedule = CronSchedule(cron=cron, timezone=zone)
    now, end = (datetime(year, 1, 1, tzinfo=clock) for year in (2028, 2029))
    moments: set[datetime] = set()
    while now < end:
        moments |= {moment.astimezone(clock) for moment in asyncio.run(schedule.get_dates(n=3, start=now))}
        now += timedelta(hours=31)
    return {moment for moment in moments if moment < end}
