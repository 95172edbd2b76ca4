/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mokctl: asks a running mokd what it is doing. An observer: opens no session and changes nothing.
 * Exit codes are for scripts; see the usage text.
 */
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "control.h"
#include "error.h"
#include "mok/mok.h"
#include "mokctl.h"
#include "names.h"

enum exit_code { EXIT_OK = 0, EXIT_REFUSED = 1, EXIT_USAGE = 2, EXIT_UNREACHABLE = 3 };

#define PROTOCOL_VERSION 1u
#define TIMEOUT_MS 10000u

static const char usage_text[] =
    "usage: mokctl [--json] [--socket PATH] COMMAND\n"
    "\n"
    "commands:\n"
    "  status    everything that mokd knows\n"
    "  devices   devices, their workers and memory\n"
    "  jobs      sessions: who, from which process, holding what\n"
    "  groups    groups: their ranks and state\n"
    "  version   versions of mokctl and of mokd\n"
    "\n"
    "options:\n"
    "  --json         JSON instead of tables\n"
    "  --socket PATH  mokd's socket; default: $MOK_SOCKET, else " MOK_DEFAULT_SOCKET "\n"
    "  --help         this text\n"
    "\n"
    "exit codes: 0 done, 1 mokd answered with an error, 2 wrong usage, 3 mokd cannot be reached\n";

struct arguments {
    const char *command, *socket;
    bool json, help;
};

struct command {
    const char *name;
    enum mokctl_part part;
};
static const struct command commands[] = {
    { "status", MOKCTL_STATUS },
    { "devices", MOKCTL_DEVICES },
    { "jobs", MOKCTL_JOBS },
    { "groups", MOKCTL_GROUPS },
};

static int parse(int argc, char **argv, struct arguments *ret)
{
    static const struct option options[] = {
        { "json", no_argument, NULL, 'j' },
        { "socket", required_argument, NULL, 's' },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    int c;

    *ret = (struct arguments){ 0 };
    while ((c = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (c) {
        case 'j':
            ret->json = true;
            break;
        case 's':
            ret->socket = optarg;
            break;
        case 'h':
            ret->help = true;
            break;
        default:
            return -1; /* getopt_long has said why */
        }
    }
    if (ret->help)
        return 0;
    if (optind == argc) {
        fprintf(stderr, "mokctl: no command\n");
        return -1;
    }
    ret->command = argv[optind++];
    if (optind < argc) {
        fprintf(stderr, "mokctl: one command only, but there is also \"%s\"\n", argv[optind]);
        return -1;
    }
    return 0;
}

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    }
    return NULL;
}

/* Says what went wrong and returns the exit code for it. */
static int complain(int code, bool connected, const char *socket)
{
    fprintf(stderr, "mokctl: %s (%s)\n", client_last_error(), mok_error_symbol(code));
    switch (-code) {
    case MOK_EDAEMON:
        fprintf(stderr, "Start it (systemctl start mokd), or name its socket with --socket or $MOK_SOCKET.\n");
        return EXIT_UNREACHABLE;
    case MOK_EACCESS:
        if (connected)
            return EXIT_REFUSED;
        fprintf(stderr, "Ask the administrator for access to %s.\n", control_socket_path(socket));
        return EXIT_UNREACHABLE;
    case MOK_ETIMEDOUT:
        fprintf(stderr, "mokd runs but does not answer; its log says why (journalctl -u mokd).\n");
        return EXIT_UNREACHABLE;
    case MOK_EFDS:
    case MOK_ENOMEM:
        return EXIT_UNREACHABLE;
    }
    return EXIT_REFUSED;
}

static int say_hello(struct control *control, struct control_answer *ret_answer)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Hello body = MOK__HELLO__INIT;

    body.protocol_min = PROTOCOL_VERSION;
    body.protocol_max = PROTOCOL_VERSION;
    body.job = (char *)"mokctl";
    body.observer = true;
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &body;
    return control_call(control, &request, TIMEOUT_MS, MOK__REPLY__BODY_HELLO, 0, ret_answer);
}

static int show_status(struct control *control, const struct command *command, bool json)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatusQuery body = MOK__STATUS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &body;
    int r = control_call(control, &request, TIMEOUT_MS, MOK__REPLY__BODY_STATUS, 0, &answer);
    if (r < 0)
        return r;
    const Mok__StatusReply *status = answer.reply->status;
    r = json ? mokctl_print_json(command->part, status) : mokctl_print_table(command->part, status);
    return r < 0 ? client_fail(MOK_ENOMEM, "no memory to print") : 0;
}

static int show_version(const Mok__HelloReply *hello, bool json)
{
    if (json) {
        int r = mokctl_print_version_json(mok_version(), hello->daemon_version, hello->protocol);
        return r < 0 ? client_fail(MOK_ENOMEM, "no memory to print") : 0;
    }
    printf("mokctl %s\nmokd %s, protocol %u\n", mok_version(), hello->daemon_version, hello->protocol);
    return 0;
}

static int run(struct control *control, const struct command *command, bool json)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;

    int r = say_hello(control, &answer);
    if (r < 0)
        return r;
    return command ? show_status(control, command, json) : show_version(answer.reply->hello, json);
}

int main(int argc, char **argv)
{
    struct control *control = NULL;
    struct arguments arguments;

    if (parse(argc, argv, &arguments) < 0) {
        fputs(usage_text, stderr);
        return EXIT_USAGE;
    }
    if (arguments.help) {
        fputs(usage_text, stdout);
        return EXIT_OK;
    }
    const struct command *command = find_command(arguments.command);
    bool is_version = strcmp(arguments.command, "version") == 0;
    if (!command && !is_version) {
        fprintf(stderr, "mokctl: no command \"%s\"\n%s", arguments.command, usage_text);
        return EXIT_USAGE;
    }

    int r = control_open(arguments.socket, TIMEOUT_MS, NULL, NULL, &control);
    if (r == -MOK_ERANGE) {
        fprintf(stderr, "mokctl: %s\n", client_last_error());
        return EXIT_USAGE;
    }
    if (r == 0)
        r = run(control, command, arguments.json);
    bool connected = control != NULL;
    control_close(control);
    if (r < 0 && is_version && !arguments.json)
        printf("mokctl %s\n", mok_version());
    if (r < 0)
        return complain(r, connected, arguments.socket);
    if (fflush(stdout) != 0) {
        fprintf(stderr, "mokctl: cannot write: %s\n", strerror(errno));
        return EXIT_REFUSED;
    }
    return EXIT_OK;
}
