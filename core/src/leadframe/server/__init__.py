"""The HTTP API: OpenAI's routes over an engine. It owns no scheduling and no device.

`leadframe.server.settings` is light; `leadframe.server.app` and `leadframe.server.lifecycle`
import the HTTP framework.
"""
