/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mokctl: asks a running mokd what it is doing. An observer: opens no session and changes nothing.
 * Exit codes are for scripts; see the usage text in arguments.c.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "command.h"
#include "error.h"
#include "mok/mok.h"
#include "mokctl.h"
#include "names.h"

static int no_memory(void)
{
    return client_fail(MOK_ENOMEM, "no memory to print");
}

static int show_status(struct control *control, const struct mokctl_arguments *arguments)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatusQuery body = MOK__STATUS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &body;
    int r = control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_STATUS, 0, &answer);
    if (r < 0)
        return r;
    const Mok__StatusReply *status = answer.reply->status;
    r = arguments->json ? mokctl_print_json(arguments->part, status) : mokctl_print_table(arguments->part, status);
    if (r == 0 && status->omitted > 0)
        fprintf(stderr, "mokctl: mokd's answer had no room for %u more jobs, groups or ranks of layers\n",
                status->omitted);
    return r < 0 ? no_memory() : 0;
}

static int show_version(const Mok__HelloReply *hello, bool json)
{
    if (json) {
        int r = mokctl_print_version_json(mok_version(), hello->daemon_version, hello->protocol);
        return r < 0 ? no_memory() : 0;
    }
    printf("mokctl %s\nmokd %s, protocol %u\n", mok_version(), hello->daemon_version, hello->protocol);
    return 0;
}

static int show_plan(const char *plan, const Mok__LayerMemory *memory, bool json)
{
    if (json)
        return mokctl_print_plan_json(plan, memory) < 0 ? no_memory() : 0;
    fputs(plan, stdout);
    return 0;
}

static int explain(struct control *control, const struct mokctl_arguments *arguments)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerDescribe body = MOK__LAYER_DESCRIBE__INIT;

    body.layer = arguments->layer;
    body.rank = arguments->rank;
    request.body_case = MOK__REQUEST__BODY_LAYER_DESCRIBE;
    request.layer_describe = &body;
    int r = control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_LAYER_DESCRIBE, 0, &answer);
    return r < 0 ? r : show_plan(answer.reply->layer_describe->text, NULL, arguments->json);
}

static int explain_shape(struct control *control, const struct mokctl_arguments *arguments)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerQuery body = MOK__LAYER_QUERY__INIT;
    Mok__LayerSpec spec = arguments->spec;

    body.spec = &spec;
    body.ep = arguments->ep;
    body.device = arguments->device;
    request.body_case = MOK__REQUEST__BODY_LAYER_QUERY;
    request.layer_query = &body;
    int r = control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_LAYER_QUERY, 0, &answer);
    if (r < 0)
        return r;
    const Mok__LayerQueryReply *reply = answer.reply->layer_query;
    return show_plan(reply->describe, reply->memory, arguments->json);
}

static int show_rack(struct control *control, bool json)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__RackQuery body = MOK__RACK_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_RACK_QUERY;
    request.rack_query = &body;
    int r = control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_RACK, 0, &answer);
    if (r < 0)
        return r;
    const Mok__RackReply *rack = answer.reply->rack;
    r = json ? mokctl_print_rack_json(rack) : mokctl_print_rack(rack);
    if (r == 0 && rack->omitted > 0)
        fprintf(stderr, "mokctl: mokd's answer had no room for %u more nodes\n", rack->omitted);
    return r < 0 ? no_memory() : 0;
}

static int run(struct control *control, const Mok__HelloReply *hello, const struct mokctl_arguments *arguments)
{
    switch (arguments->action) {
    case MOKCTL_VERSION:
        return show_version(hello, arguments->json);
    case MOKCTL_EXPLAIN:
        return explain(control, arguments);
    case MOKCTL_WOULD_BE:
        return explain_shape(control, arguments);
    case MOKCTL_RACK:
        return show_rack(control, arguments->json);
    case MOKCTL_SHOW:
        break;
    }
    return show_status(control, arguments);
}

/* What was printed is out, or that it is not is said. */
static int flushed(void)
{
    if (fflush(stdout) == 0)
        return EXIT_OK;
    fprintf(stderr, "mokctl: cannot write: %s\n", strerror(errno));
    return EXIT_REFUSED;
}

int main(int argc, char **argv)
{
    _cleanup_answer_ struct control_answer hello = CONTROL_ANSWER_INIT;
    struct control *control = NULL;
    struct mokctl_arguments arguments;

    const struct mokctl_command *command = mokctl_command_find(argc, argv);

    if (command)
        return mokctl_command_run(command, argc, argv);
    if (argc > 1 && strcmp(argv[1], "keygen") == 0)
        return mokctl_keygen(argc - 1, argv + 1);
    if (mokctl_parse(argc, argv, &arguments) < 0) {
        fputs("try: mokctl --help\n", stderr);
        return EXIT_USAGE;
    }
    if (arguments.help) {
        fputs(mokctl_usage, stdout);
        return flushed();
    }
    int r = mokctl_connect(arguments.socket, MOKCTL_TIMEOUT_MS, &control, &hello);
    if (r == 0)
        r = run(control, hello.reply->hello, &arguments);
    bool connected = control != NULL;
    control_answer_clear(&hello); /* an answer belongs to its connection */
    control_close(control);
    if (r < 0 && arguments.action == MOKCTL_VERSION && !arguments.json)
        printf("mokctl %s\n", mok_version());
    if (r < 0)
        return mokctl_complain(r, connected, arguments.socket);
    return flushed();
}
