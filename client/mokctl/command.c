/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "mok/mok.h"
#include "mokctl.h"
#include "names.h"
#include "util.h"

#define PROTOCOL_VERSION 1u

static const struct mokctl_command commands[] = {
    { "quota", MOKCTL_NEEDS_MOKD, "user all", NULL, mokctl_quota },
    { "usage", MOKCTL_NEEDS_MOKD, "since by", NULL, mokctl_usage_of_jobs },
    { "drain", MOKCTL_NEEDS_MOKD, "node wait", "DEVICE|NODE", mokctl_drain },
    { "top", MOKCTL_NEEDS_MOKD, "once interval", NULL, mokctl_top },
    { "trace", MOKCTL_NEEDS_MOKD, "seconds out", NULL, mokctl_trace },
    { "undrain", MOKCTL_NEEDS_MOKD, "node", "DEVICE|NODE", mokctl_undrain },
    { "doctor", MOKCTL_NEEDS_NOTHING, "config", NULL, mokctl_doctor },
    { "bundle", MOKCTL_NEEDS_NOTHING, "out config", NULL, mokctl_bundle },
};

enum {
    OPTION_USER = 1,
    OPTION_SINCE,
    OPTION_BY,
    OPTION_OUT,
    OPTION_CONFIG,
    OPTION_ALL,
    OPTION_NODE,
    OPTION_WAIT,
    OPTION_ONCE,
    OPTION_INTERVAL,
    OPTION_SECONDS,
    OPTION_JSON,
    OPTION_SOCKET,
    OPTION_HELP
};

static const struct option options[] = {
    { "user", required_argument, NULL, OPTION_USER },     { "since", required_argument, NULL, OPTION_SINCE },
    { "by", required_argument, NULL, OPTION_BY },         { "out", required_argument, NULL, OPTION_OUT },
    { "config", required_argument, NULL, OPTION_CONFIG }, { "all", no_argument, NULL, OPTION_ALL },
    { "node", no_argument, NULL, OPTION_NODE },           { "wait", no_argument, NULL, OPTION_WAIT },
    { "once", no_argument, NULL, OPTION_ONCE },           { "interval", required_argument, NULL, OPTION_INTERVAL },
    { "seconds", required_argument, NULL, OPTION_SECONDS },
    { "json", no_argument, NULL, OPTION_JSON },           { "socket", required_argument, NULL, OPTION_SOCKET },
    { "help", no_argument, NULL, OPTION_HELP },           { NULL, 0, NULL, 0 },
};

/* ------------------------------------------------------------------ the command line */

/* Only --socket has a value and may stand before the command. */
const struct mokctl_command *mokctl_command_find(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--socket") == 0)
            i++;
        else if (argv[i][0] != '-') {
            for (size_t k = 0; k < ARRAY_SIZE(commands); k++)
                if (strcmp(commands[k].name, argv[i]) == 0)
                    return &commands[k];
            return NULL;
        }
    }
    return NULL;
}

static bool takes(const struct mokctl_command *command, const char *option)
{
    size_t length = strlen(option);

    for (const char *at = command->options; (at = strstr(at, option)); at += length)
        if ((at == command->options || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0'))
            return true;
    return false;
}

static void take_option(int option, const char *value, struct mokctl_line *ret)
{
    switch (option) {
    case OPTION_USER:
        ret->user = value;
        return;
    case OPTION_SINCE:
        ret->since = value;
        return;
    case OPTION_BY:
        ret->by = value;
        return;
    case OPTION_OUT:
        ret->out = value;
        return;
    case OPTION_CONFIG:
        ret->config = value;
        return;
    case OPTION_ALL:
        ret->all = true;
        return;
    case OPTION_NODE:
        ret->node = true;
        return;
    case OPTION_WAIT:
        ret->wait = true;
        return;
    case OPTION_ONCE:
        ret->once = true;
        return;
    case OPTION_INTERVAL:
        ret->interval = value;
        return;
    case OPTION_SECONDS:
        ret->seconds = value;
        return;
    case OPTION_JSON:
        ret->json = true;
        return;
    case OPTION_SOCKET:
        ret->socket = value;
        return;
    default:
        ret->help = true;
    }
}

/* 0, or -1 after saying what is wrong. */
static int parse(const struct mokctl_command *command, int argc, char **argv, struct mokctl_line *ret)
{
    int index = 0;

    for (int c; (c = getopt_long(argc, argv, "h", options, &index)) != -1;) {
        if (c == '?')
            return -1; /* getopt_long has said why */
        if (c < OPTION_JSON && !takes(command, options[index].name)) {
            fprintf(stderr, "mokctl: --%s does not belong to %s\n", options[index].name, command->name);
            return -1;
        }
        take_option(c, optarg, ret);
    }
    int first = optind + 1; /* behind the command */
    if (command->argument && first < argc)
        ret->argument = argv[first++];
    if (first < argc) {
        fprintf(stderr, "mokctl: %s takes %s, but there is also \"%s\"\n", command->name,
                command->argument ? "one argument" : "no arguments", argv[first]);
        return -1;
    }
    return 0;
}

int mokctl_whole_number(const char *option, const char *text, unsigned most, unsigned *ret)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);

    if (text[0] < '0' || text[0] > '9' || *end || value < 1 || value > most) {
        fprintf(stderr, "mokctl: --%s %s: must be a whole number in 1..%u\n", option, text, most);
        return -1;
    }
    *ret = (unsigned)value;
    return 0;
}

/* ------------------------------------------------------------------ asking mokd */

int mokctl_complain(int code, bool connected, const char *socket)
{
    if (code == -MOK_ERANGE && !connected) {
        fprintf(stderr, "mokctl: %s\ntry: mokctl --help\n", client_last_error());
        return EXIT_USAGE;
    }
    fprintf(stderr, "mokctl: %s (%s)\n", client_last_error(), mok_error_symbol(code));
    switch (-code) {
    case MOK_EDAEMON:
        fprintf(stderr, "Start it (mokd --config FILE), or name its socket with --socket or $MOK_SOCKET.\n");
        return EXIT_UNREACHABLE;
    case MOK_EACCESS:
        if (connected)
            return EXIT_REFUSED;
        fprintf(stderr, "Ask the administrator for access to %s.\n", control_socket_path(socket));
        return EXIT_UNREACHABLE;
    case MOK_ETIMEDOUT:
        fprintf(stderr, "mokd runs but does not answer; its log says why.\n");
        return EXIT_UNREACHABLE;
    case MOK_EFDS:
    case MOK_ENOMEM:
        return EXIT_UNREACHABLE;
    }
    return EXIT_REFUSED;
}

static int say_hello(struct control *control, unsigned timeout_ms, struct control_answer *ret_answer)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Hello body = MOK__HELLO__INIT;

    body.protocol_min = PROTOCOL_VERSION;
    body.protocol_max = PROTOCOL_VERSION;
    body.job = (char *)"mokctl";
    body.observer = true;
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &body;
    return control_call(control, &request, timeout_ms, MOK__REPLY__BODY_HELLO, 0, ret_answer);
}

int mokctl_connect(const char *socket, unsigned timeout_ms, struct control **ret_control,
                   struct control_answer *ret_hello)
{
    int r = control_open(socket, timeout_ms, NULL, NULL, ret_control);
    return r < 0 ? r : say_hello(*ret_control, timeout_ms, ret_hello);
}

int mokctl_ask_devices(struct control *control, struct control_answer *ret)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__DeviceList body = MOK__DEVICE_LIST__INIT;

    request.body_case = MOK__REQUEST__BODY_DEVICE_LIST;
    request.device_list = &body;
    return control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_DEVICE_LIST, 0, ret);
}

int mokctl_ask_status(struct control *control, unsigned timeout_ms, struct control_answer *ret)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatusQuery body = MOK__STATUS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &body;
    return control_call(control, &request, timeout_ms, MOK__REPLY__BODY_STATUS, 0, ret);
}

/* ------------------------------------------------------------------ JSON */

void mokctl_json_number(cJSON *object, const char *name, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%" PRIu64, value);
    cJSON_AddRawToObject(object, name, text);
}

int mokctl_json_print(cJSON *root)
{
    char *text = root ? cJSON_Print(root) : NULL;

    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(root);
    return text ? 0 : client_fail(MOK_ENOMEM, "no memory to print");
}

/* ------------------------------------------------------------------ running */

static int run_connected(const struct mokctl_command *command, struct mokctl_line *line)
{
    _cleanup_answer_ struct control_answer hello = CONTROL_ANSWER_INIT;

    int r = mokctl_connect(line->socket, MOKCTL_TIMEOUT_MS, &line->control, &hello);
    if (r == 0)
        r = command->run(line);
    if (r < 0)
        r = mokctl_complain(r, line->control != NULL, line->socket);
    control_answer_clear(&hello); /* an answer belongs to its connection */
    control_close(line->control);
    return r;
}

int mokctl_command_run(const struct mokctl_command *command, int argc, char **argv)
{
    struct mokctl_line line = { 0 };

    if (parse(command, argc, argv, &line) < 0) {
        fputs("try: mokctl --help\n", stderr);
        return EXIT_USAGE;
    }
    if (line.help) {
        fputs(mokctl_usage, stdout);
        return EXIT_OK;
    }
    int code = command->needs == MOKCTL_NEEDS_MOKD ? run_connected(command, &line) : command->run(&line);
    if (code < 0)
        code = mokctl_complain(code, true, line.socket);
    if (fflush(stdout) != 0) {
        fprintf(stderr, "mokctl: cannot write: %s\n", strerror(errno));
        return EXIT_REFUSED;
    }
    return code;
}
