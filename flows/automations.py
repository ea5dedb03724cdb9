"""The automations that a Trainyard server runs: dead runs are closed and tried again, people are told what happened.

They apply to runs with the tag ``trainyard`` (every deployment of prefect.yaml has it) and to events of our pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

from prefect.automations import Automation, CallWebhook, ChangeFlowRunState, EventTrigger, Posture, SendNotification
from prefect.client.schemas.objects import StateType

from flows import events

HEARTBEAT_S = 30
"""How often a run says that it lives: PREFECT_FLOWS_HEARTBEAT_FREQUENCY in prefect.yaml, the least that Prefect takes."""
SILENCE_S = 95
"""A run that said nothing for so long is dead: two heartbeats missed, and time for a server that is restarted. Two minutes are promised."""
PENDING_S = 300
"""A run that a worker took and did not start within so long goes back to the queue."""
RETRY_S = 15
"""A crashed run waits so long before it is tried again: the server may say twice within seconds that it crashed."""
MAX_STARTS = 3
"""A run that crashed as often as this stays crashed."""
OVER = ("Completed", "Unchanged", "Rejected", "Failed", "TimedOut", "Cancelled", "Paused", "Suspended")
"""Names of states in which no process need live. One that is missing here does no harm: the server keeps a final state."""
QUEUED = ("AwaitingRetry", "AwaitingConcurrencySlot", "Late", "Scheduled")
RUNS = {"prefect.resource.id": "prefect.flow-run.*"}
OURS = {"prefect.resource.id": "prefect.tag.trainyard", "prefect.resource.role": "tag"}
RUN = "{{ flow.name }}/{{ flow_run.name }}"
UI = "{{ flow_run|ui_url }}"
TOLD: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "failure": (("prefect.flow-run.Failed", "prefect.flow-run.TimedOut"), f"{RUN} failed", f"{{{{ flow_run.state.message }}}}\n{UI}"),
    "crash": (("prefect.flow-run.Crashed",), f"{RUN} crashed", f"{{{{ flow_run.state.message }}}}\n{UI}"),
    "rejection": ((events.MODEL_REJECTED,), "{{ event.payload.model }}: rejected", "{{ event.payload.reason }}"),
    "promotion": (
        (events.MODEL_PROMOTED,),
        "{{ event.payload.model }}: version {{ event.payload.version }} is in service",
        "{{ event.payload.tag }}",
    ),
    "rollback": (
        (events.MODEL_ROLLED_BACK,),
        "{{ event.payload.model }}: back to version {{ event.payload.version }}",
        "{{ event.payload.tag }}: {{ event.payload.reason }}",
    ),
    "drift": ((events.DRIFT_DETECTED,), "{{ event.resource.name }}: drift", "{{ event.payload.reason }}"),
}
"""What a person is told of: the events, and the subject and body of the message (Jinja, rendered by the server)."""


def run_events(*names: str) -> set[str]:
    """State names as the events that the server emits of a flow run."""
    return {f"prefect.flow-run.{name}" for name in names}


def keepers() -> list[Automation]:
    """The automations that keep the server's book of runs honest."""
    return [
        Automation(
            name="trainyard: no heartbeat, crashed",
            description=f"A run whose process said nothing for {SILENCE_S} s is dead: its state says so, and its slots are freed.",
            trigger=EventTrigger(
                after=run_events("heartbeat"),
                expect=run_events("heartbeat", "Crashed", *OVER, *QUEUED),  # not Cancelling: whoever should end it may be gone too
                match=RUNS,
                match_related=OURS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=SILENCE_S),
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=f"no heartbeat for {SILENCE_S} s: its process is gone")],
        ),
        Automation(
            name="trainyard: crashed, tried again",
            description=f"A crashed run goes back to its queue, and goes on from its last checkpoint; at most {MAX_STARTS} starts.",
            trigger=EventTrigger(
                after=run_events("Crashed"),
                expect=run_events("Pending", "Running", *OVER, *QUEUED),
                # Not 0: one that crashes before it ever ran, on an import error say, would come back for ever.
                match={**RUNS, "prefect.run-count": [str(start) for start in range(1, MAX_STARTS)]},
                match_related=OURS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=RETRY_S),
            ),
            actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="tried again after a crash")],
        ),
        Automation(
            name="trainyard: never started, queued again",
            description=f"A run that a worker took {PENDING_S} s ago and never started goes back to its queue: the worker is gone.",
            trigger=EventTrigger(
                after=run_events("Pending"),
                expect=run_events("Running", "Crashed", *OVER, *QUEUED),
                match=RUNS,
                match_related=OURS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=PENDING_S),
            ),
            actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="its worker took it and never started it")],
        ),
    ]


def tellers(block: str, block_id: UUID, is_webhook: bool) -> list[Automation]:
    """The automations that tell the notification block ``block`` of each kind of event in TOLD."""
    made = []
    for kind, (names, subject, body) in TOLD.items():
        of_run = names[0].startswith("prefect.")
        action: CallWebhook | SendNotification = SendNotification(block_document_id=block_id, subject=f"Trainyard: {subject}", body=body)
        if is_webhook:
            said = f"{{% set subject %}}{subject}{{% endset %}}{{% set body %}}{body}{{% endset %}}"
            payload = f'{said}{{"kind": "{kind}", "subject": {{{{ subject|tojson }}}}, "body": {{{{ body|tojson }}}}}}'
            action = CallWebhook(block_document_id=block_id, payload=payload)
        trigger = EventTrigger(
            expect=set(names),
            match=RUNS if of_run else {"prefect.resource.id": events.resource_id("*")},
            match_related=OURS if of_run else {},
            for_each={"prefect.resource.id"},
        )
        made.append(Automation(name=f"trainyard: {kind} to {block}", description=f"Tells {block} of each {kind}.", trigger=trigger, actions=[action]))
    return made
