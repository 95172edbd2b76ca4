/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions that go on with the next mokd, as a client sees that writes its own messages, and as a thief does. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"
#include "state_file.h"
#include "util.h"

enum { STORE = 256, OWN = 3, TOKEN = 32, OTHER_USER = 65534 };

static const char short_wait[] = "resume_timeout = 1\n[device host0]\nmemory = 64M\n[device host1]\nmemory = 64M\n";

struct ticket {
    uint64_t session;
    uint8_t token[TOKEN];
};

/* ------------------------------------------------------------------ conversations */

static struct ticket open_kept(struct client *client, const struct daemon *daemon)
{
    struct ticket ticket = { 0 };
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    hello.features = MOK_FEATURE_RESUME;
    client_connect(client, daemon);
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->code, 0);
    client->session = ticket.session = answer.reply->hello->session;
    assert_int_equal(answer.reply->hello->resume_token.len, TOKEN);
    memcpy(ticket.token, answer.reply->hello->resume_token.data, TOKEN);
    return ticket;
}

struct claim {
    struct ticket ticket;
    uint32_t groups[4], objects[4];
    size_t n_groups, n_objects;
    bool complete;
};

static struct answer claim(struct client *client, const struct daemon *daemon, const struct claim *what)
{
    Mok__Resume resume = MOK__RESUME__INIT;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    resume.session = what->ticket.session;
    resume.token = (ProtobufCBinaryData){ .len = TOKEN, .data = (uint8_t *)what->ticket.token };
    resume.complete = what->complete;
    resume.n_group = what->n_groups;
    resume.group = (uint32_t *)what->groups;
    resume.n_object = what->n_objects;
    resume.object = (uint32_t *)what->objects;
    hello.features = MOK_FEATURE_RESUME;
    hello.resume = &resume;
    client_connect(client, daemon);
    return client_ask(client, &request);
}

static void come_back(struct client *client, const struct daemon *daemon, const struct claim *what)
{
    _cleanup_answer_ struct answer answer = claim(client, daemon, what);

    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.reply->hello->session, what->ticket.session);
    assert_int_equal(answer.reply->hello->resume_token.len, TOKEN);
    assert_memory_equal(answer.reply->hello->resume_token.data, what->ticket.token, TOKEN);
}

/* The code; the connection ends. */
static int turned_away(const struct daemon *daemon, const struct claim *what)
{
    struct client client;
    _cleanup_answer_ struct answer answer = claim(&client, daemon, what);
    int code = answer.reply->code;

    assert_true(strlen(answer.reply->text) > 0);
    client_expect_end(&client);
    client_close(&client);
    return code;
}

static uint64_t send_recover(struct client *client, uint64_t timeout_ms)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Recover recover = MOK__RECOVER__INIT;

    recover.timeout_ms = timeout_ms;
    request.body_case = MOK__REQUEST__BODY_RECOVER;
    request.recover = &recover;
    return client_send(client, &request);
}

static void expect_store(const struct daemon *daemon, size_t count)
{
    for (int waited = 0; waited < 5000 && fdstore_count(daemon->store) != count; waited += 5)
        sleep_ms(5);
    assert_int_equal(fdstore_count(daemon->store), count);
}

static bool keeps(const struct daemon *daemon, const char *name)
{
    _cleanup_fd_ int fd = fdstore_dup(daemon->store, name);
    return fd >= 0;
}

static bool log_has(const struct daemon *daemon, const char *what)
{
    char line[1024];
    bool found = false;
    FILE *file = fopen(daemon->log, "re");

    while (file && !found && fgets(line, sizeof(line), file))
        found = strstr(line, what) != NULL;
    if (file)
        fclose(file);
    return found;
}

/* ------------------------------------------------------------------ coming back */

static void a_session_comes_back_with_what_it_has(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;
    const int numbers[] = { SIGKILL, SIGTERM };

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim own = { .ticket = open_kept(&client, &daemon), .complete = true, .n_objects = 1 };
    own.objects[0] = client_buffer(&client, 1, 100000);
    uint64_t bytes = client_bytes_used(&client);
    expect_store(&daemon, OWN + 1);
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        daemon_end(&daemon, numbers[i]);
        assert_int_equal(client_expect_end(&client), numbers[i] == SIGTERM ? -MOK_EDAEMON : 0);
        client_close(&client);
        daemon_begin(&daemon);
        come_back(&client, &daemon, &own);
        assert_int_equal(client_bytes_used(&client), bytes);
        expect_store(&daemon, OWN + 1);
    }
    _cleanup_answer_ struct answer status = client_status(&client);
    assert_int_equal(status.reply->status->n_job, 1);
    assert_true(status.reply->status->job[0]->resumable);
    assert_false(status.reply->status->job[0]->away);
    assert_int_equal(status.reply->status->job[0]->buffers, 1);
    assert_int_equal(status.reply->status->store_bound, STORE);
    assert_int_equal(status.reply->status->store_used, OWN + 1);
    assert_true(client_buffer(&client, 0, 4096) > own.objects[0]); /* no id is given twice */
    client_close(&client);
    expect_store(&daemon, OWN);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void what_the_client_never_heard_of_goes(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim other = { .ticket = open_kept(&client, &daemon), .complete = true, .n_objects = 1 };
    client_buffer(&client, 0, 4096);
    other.objects[0] = client_buffer(&client, 0, 8192);
    daemon_end(&daemon, SIGKILL);
    client_close(&client);
    daemon_begin(&daemon);
    come_back(&client, &daemon, &other);
    expect_store(&daemon, OWN + 1);
    client_expect_bytes(&client, 8192);
    client_close(&client);
    expect_store(&daemon, OWN);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void nobody_else_gets_a_session(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim own = { .ticket = open_kept(&client, &daemon) };
    assert_int_equal(turned_away(&daemon, &own), -MOK_ESESSION); /* its client is connected */
    daemon_end(&daemon, SIGKILL);
    client_close(&client);
    daemon_begin(&daemon);
    struct claim wrong = own;
    wrong.ticket.token[TOKEN - 1] ^= 1;
    assert_int_equal(turned_away(&daemon, &wrong), -MOK_EACCESS);
    wrong = own;
    wrong.ticket.session++;
    assert_int_equal(turned_away(&daemon, &wrong), -MOK_ESESSION);
    wrong.ticket.session = 0;
    assert_int_equal(turned_away(&daemon, &wrong), -MOK_ESESSION);
    if (geteuid() == 0) {
        assert_int_equal(seteuid(OTHER_USER), 0);
        int code = turned_away(&daemon, &own);
        assert_int_equal(seteuid(0), 0);
        assert_int_equal(code, -MOK_EACCESS);
    }
    come_back(&client, &daemon, &own);
    assert_int_equal(turned_away(&daemon, &own), -MOK_ESESSION); /* said again by who has overheard it */
    client_bytes_used(&client); /* and its client has noticed nothing */
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void who_comes_too_late_is_told_so(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client, observer;

    daemon_start_kept(&daemon, short_wait, STORE);
    struct claim own = { .ticket = open_kept(&client, &daemon) };
    client_buffer(&client, 0, 65536);
    daemon_end(&daemon, SIGKILL);
    client_close(&client);
    daemon_begin(&daemon);
    client_observe(&observer, &daemon);
    _cleanup_answer_ struct answer status = client_status(&observer);
    assert_int_equal(status.reply->status->n_job, 1);
    assert_true(status.reply->status->job[0]->away);
    expect_store(&daemon, OWN);
    client_expect_bytes(&observer, 0);
    assert_int_equal(turned_away(&daemon, &own), -MOK_ESESSION);
    client_close(&observer);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ groups */

static void pair(struct daemon *daemon, struct client clients[2], struct claim claims[2])
{
    for (int r = 0; r < 2; r++)
        claims[r] = (struct claim){ .ticket = open_kept(&clients[r], daemon), .complete = true, .n_groups = 1 };
    claims[0].groups[0] = claims[1].groups[0] = client_join(clients, 2, "pair");
}

static void come_back_both(struct daemon *daemon, struct client clients[2], const struct claim claims[2])
{
    daemon_end(daemon, SIGKILL);
    for (int r = 0; r < 2; r++)
        client_close(&clients[r]);
    daemon_begin(daemon);
    for (int r = 0; r < 2; r++)
        come_back(&clients[r], daemon, &claims[r]);
}

static void a_group_is_whole_again_once_all_ranks_want_it(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client clients[2];
    struct claim claims[2];

    daemon_start_kept(&daemon, NULL, STORE);
    pair(&daemon, clients, claims);
    come_back_both(&daemon, clients, claims);
    send_recover(&clients[0], 0);
    _cleanup_answer_ struct answer early = client_receive(&clients[0]);
    assert_int_equal(early.reply->code, -MOK_ESTATE); /* no queue yet */
    for (uint32_t r = 0; r < 2; r++)
        client_queue(&clients[r], r);
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, claims[0].groups[0], 0, 4096);
    _cleanup_answer_ struct answer busy = client_ask(&clients[0], &request);
    assert_int_equal(busy.reply->code, -MOK_EBUSY);
    send_recover(&clients[0], 100);
    _cleanup_answer_ struct answer late = client_receive(&clients[0]);
    assert_int_equal(late.reply->code, -MOK_ETIMEDOUT);
    assert_non_null(strstr(late.reply->text, "rank 1 has not recovered"));
    send_recover(&clients[0], 0);
    send_recover(&clients[1], 0);
    for (int r = 0; r < 2; r++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[r]);
        assert_int_equal(answer.reply->code, 0);
    }
    for (int r = 0; r < 2; r++)
        client_send(&clients[r], &request);
    for (int r = 0; r < 2; r++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[r]);
        assert_int_equal(answer.reply->code, 0);
    }
    for (int r = 0; r < 2; r++)
        client_close(&clients[r]);
    expect_store(&daemon, OWN);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_rank_that_leaves_or_goes_fails_a_group_that_waits(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client clients[2];
    struct claim claims[2];

    daemon_start_kept(&daemon, NULL, STORE);
    pair(&daemon, clients, claims);
    come_back_both(&daemon, clients, claims);
    client_queue(&clients[0], 0);
    send_recover(&clients[0], 0);
    client_close(&clients[1]);
    _cleanup_answer_ struct answer event = client_receive(&clients[0]);
    assert_int_equal(event.reply->id, 0);
    assert_int_equal(event.reply->body_case, MOK__REPLY__BODY_GROUP_FAILED);
    assert_int_equal(event.reply->code, -MOK_EPEER);
    _cleanup_answer_ struct answer answer = client_receive(&clients[0]);
    assert_int_equal(answer.reply->code, 0); /* the session itself is well */
    client_close(&clients[0]);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void groups_that_did_not_outlive_mokd_are_named(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client clients[2];
    struct claim kept;

    daemon_start_kept(&daemon, NULL, STORE);
    kept = (struct claim){ .ticket = open_kept(&clients[0], &daemon), .complete = true, .n_groups = 1 };
    client_open(&clients[1], &daemon); /* says nothing of coming back: it ends with mokd, and its groups do */
    kept.groups[0] = client_join(clients, 2, "mixed");
    daemon_end(&daemon, SIGKILL);
    for (int r = 0; r < 2; r++)
        client_close(&clients[r]);
    daemon_begin(&daemon);
    come_back(&clients[0], &daemon, &kept);
    _cleanup_answer_ struct answer event = client_receive(&clients[0]);
    assert_int_equal(event.reply->id, 0);
    assert_int_equal(event.reply->body_case, MOK__REPLY__BODY_GROUP_FAILED);
    assert_int_equal(event.reply->group_failed->group, kept.groups[0]);
    assert_int_equal(event.reply->code, -MOK_EDAEMON);
    client_close(&clients[0]);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ what is kept, and where nothing is */

static void without_a_store_or_a_time_to_wait_there_is_no_token(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;

    for (int kind = 0; kind < 2; kind++) {
        Mok__Hello hello;
        Mok__Request request = ask_hello(&hello);
        hello.features = MOK_FEATURE_RESUME;
        if (kind == 0)
            daemon_start(&daemon, NULL, 0);
        else
            daemon_start_kept(&daemon, "resume_timeout = 0\n[device host0]\nmemory = 64M\n", STORE);
        client_connect(&client, &daemon);
        _cleanup_answer_ struct answer answer = client_ask(&client, &request);
        assert_int_equal(answer.reply->code, 0);
        assert_int_equal(answer.reply->hello->resume_token.len, 0);
        if (kind == 1)
            expect_store(&daemon, 0);
        client_close(&client);
        assert_int_equal(daemon_stop(&daemon), 0);
    }
}

static void what_belongs_to_nothing_is_dropped_and_what_is_not_ours_stays(void **state)
{
    (void)state;
    struct daemon daemon;
    _cleanup_fd_ int stray = memfd_create("stray", MFD_CLOEXEC);

    daemon_start_kept(&daemon, NULL, STORE);
    expect_store(&daemon, OWN);
    daemon_end(&daemon, SIGKILL);
    assert_int_equal(fdstore_plant(daemon.store, "mok-777777", stray), 0);
    assert_int_equal(fdstore_plant(daemon.store, "mok-777777", stray), 0);
    assert_int_equal(fdstore_plant(daemon.store, "somebody-elses", stray), 0);
    daemon_begin(&daemon);
    for (int waited = 0; waited < 5000 && keeps(&daemon, "mok-777777"); waited += 5)
        sleep_ms(5);
    assert_false(keeps(&daemon, "mok-777777"));
    expect_store(&daemon, OWN + 1);
    assert_true(keeps(&daemon, "somebody-elses"));
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_session_whose_memory_got_lost_is_not_resumed(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client, other;
    char name[64];

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim own = { .ticket = open_kept(&client, &daemon) };
    struct claim well = { .ticket = open_kept(&other, &daemon) };
    client_buffer(&client, 0, 4096);
    fdstore_settle(daemon.store);
    fdstore_name(daemon.store, OWN, name); /* the newest */
    daemon_end(&daemon, SIGKILL);
    client_close(&client);
    client_close(&other);
    fdstore_lose(daemon.store, name);
    daemon_begin(&daemon);
    assert_int_equal(turned_away(&daemon, &own), -MOK_ESESSION);
    assert_true(log_has(&daemon, "memory or device is not there any more"));
    come_back(&other, &daemon, &well);
    client_close(&other);
    expect_store(&daemon, OWN);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* Rewrites the state as `change` wants it. */
static void edit_state(struct daemon *daemon, void (*change)(uint8_t *bytes, size_t *size))
{
    _cleanup_fd_ int file = fdstore_dup(daemon->store, "mok-state");
    struct mokd_error error = { 0 };
    void *bytes = NULL;
    size_t size = 0;
    uint64_t sequence = 0;

    assert_int_equal(mokd_state_file_read(file, &bytes, &size, &sequence, &error), 0);
    bytes = realloc(bytes, size + 64);
    assert_non_null(bytes);
    change(bytes, &size);
    assert_int_equal(mokd_state_file_write(file, sequence + 1, bytes, size), 0);
    free(bytes);
}

/* Field 1000, a varint, and field 1001, four bytes: of a mokd that is newer than this one. */
static void add_unknown_fields(uint8_t *bytes, size_t *size)
{
    static const uint8_t more[] = { 0xc0, 0x3e, 0x2a, 0xca, 0x3e, 0x04, 'n', 'e', 'w', '!' };

    memcpy(bytes + *size, more, sizeof(more));
    *size += sizeof(more);
}

static void cut_in_half(uint8_t *bytes, size_t *size)
{
    (void)bytes;
    *size /= 2;
}

/* Session ids are the state's first number behind its version text: 0 means that none was ever given out. */
static void deny_sessions(uint8_t *bytes, size_t *size)
{
    size_t at = 2u + bytes[1];

    (void)size;
    assert_int_equal(bytes[at], 2 << 3);
    bytes[at + 1] = 0;
}

static void the_state_of_a_newer_build_is_understood(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim own = { .ticket = open_kept(&client, &daemon) };
    daemon_end(&daemon, SIGKILL);
    client_close(&client);
    edit_state(&daemon, add_unknown_fields);
    daemon_begin(&daemon);
    come_back(&client, &daemon, &own);
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_state_that_contradicts_itself_is_not_used(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;
    void (*const changes[])(uint8_t * bytes, size_t * size) = { cut_in_half, deny_sessions };

    for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
        daemon_start_kept(&daemon, NULL, STORE);
        struct claim own = { .ticket = open_kept(&client, &daemon) };
        client_buffer(&client, 0, 4096);
        daemon_end(&daemon, SIGKILL);
        client_close(&client);
        edit_state(&daemon, changes[i]);
        daemon_begin(&daemon);
        assert_true(log_has(&daemon, "not used, mokd starts without sessions"));
        assert_int_equal(turned_away(&daemon, &own), -MOK_ESESSION);
        expect_store(&daemon, OWN);
        open_kept(&client, &daemon); /* and works */
        client_buffer(&client, 0, 4096);
        expect_store(&daemon, OWN + 1);
        client_close(&client);
        assert_int_equal(daemon_stop(&daemon), 0);
    }
}

static void a_device_that_is_another_one_now_loses_its_sessions(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client, other;

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim first = { .ticket = open_kept(&client, &daemon) };
    struct claim second = { .ticket = open_kept(&other, &daemon) };
    client_buffer(&client, 0, 4096);
    client_buffer(&other, 1, 4096);
    daemon_end(&daemon, SIGTERM);
    client_close(&client);
    client_close(&other);
    daemon_configure(&daemon, "[device host0]\nmemory = 64M\n[device renamed]\nmemory = 64M\n");
    daemon_begin(&daemon);
    assert_int_equal(turned_away(&daemon, &second), -MOK_ESESSION);
    come_back(&client, &daemon, &first);
    client_close(&client);
    expect_store(&daemon, OWN);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_device_that_has_less_memory_now_than_its_sessions_gives_no_more(void **state)
{
    (void)state;
    struct daemon daemon;
    struct client client;

    daemon_start_kept(&daemon, NULL, STORE);
    struct claim mine = { .ticket = open_kept(&client, &daemon) };
    client_buffer(&client, 0, 8 << 20);
    daemon_end(&daemon, SIGTERM);
    client_close(&client);
    daemon_configure(&daemon, "[device host0]\nmemory = 4M\n[device host1]\nmemory = 64M\n");
    daemon_begin(&daemon);
    come_back(&client, &daemon, &mine);
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, 0, 0, 4096);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, -MOK_ENOMEM);
    assert_non_null(strstr(answer.reply->text, "device host0 has 4194304 bytes, 8388608 of them in use"));
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_comes_back_with_what_it_has),
        cmocka_unit_test(what_the_client_never_heard_of_goes),
        cmocka_unit_test(nobody_else_gets_a_session),
        cmocka_unit_test(who_comes_too_late_is_told_so),
        cmocka_unit_test(a_group_is_whole_again_once_all_ranks_want_it),
        cmocka_unit_test(a_rank_that_leaves_or_goes_fails_a_group_that_waits),
        cmocka_unit_test(groups_that_did_not_outlive_mokd_are_named),
        cmocka_unit_test(without_a_store_or_a_time_to_wait_there_is_no_token),
        cmocka_unit_test(what_belongs_to_nothing_is_dropped_and_what_is_not_ours_stays),
        cmocka_unit_test(a_session_whose_memory_got_lost_is_not_resumed),
        cmocka_unit_test(the_state_of_a_newer_build_is_understood),
        cmocka_unit_test(a_state_that_contradicts_itself_is_not_used),
        cmocka_unit_test(a_device_that_is_another_one_now_loses_its_sessions),
        cmocka_unit_test(a_device_that_has_less_memory_now_than_its_sessions_gives_no_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
