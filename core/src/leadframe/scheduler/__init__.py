"""Which tokens of which request run in this step."""

from leadframe.scheduler.output import ScheduledRow, SchedulerOutput
from leadframe.scheduler.scheduler import Scheduler
from leadframe.scheduler.waiting import WaitingQueue

__all__ = ["ScheduledRow", "Scheduler", "SchedulerOutput", "WaitingQueue"]
