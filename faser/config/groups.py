"""The groups of settings in `--help` and in docs/cli.md."""

MODEL, ENGINE, SPECULATION, SERVER, OUTPUT = "model", "engine", "speculation", "server", "output"
GROUPS = {
    MODEL: "which model, and how it is held",
    ENGINE: "how the engine uses the machine",
    SPECULATION: "how tokens are drafted and verified",
    SERVER: "the HTTP server",
    OUTPUT: "what answers contain",
}
