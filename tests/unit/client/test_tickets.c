/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets are never 0, never given out twice, and found only while they are valid. */
#include "support.h"

#include "tickets.h"

static struct ticket_table table;

static int set_up(void **state)
{
    (void)state;
    return ticket_table_init(&table, 63, 8);
}

static int tear_down(void **state)
{
    (void)state;
    ticket_table_clear(&table);
    return 0;
}

static void a_table_gives_as_many_tickets_as_it_has_slots_and_then_none(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++)
        assert_non_null(ticket_take(&table));
    assert_null(ticket_take(&table));
    assert_int_equal(table.used, 8);
}

static void a_ticket_names_its_slot_and_its_device_and_is_not_0(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct ticket_slot *slot = ticket_take(&table);
        assert_int_not_equal(slot->ticket, 0);
        assert_int_equal(ticket_device(slot->ticket), 63);
        assert_ptr_equal(ticket_find(&table, slot->ticket), slot);
    }
}

static void a_ticket_that_was_given_back_is_unknown_although_its_slot_is_used_again(void **state)
{
    (void)state;
    struct ticket_slot *slot = ticket_take(&table);
    mok_ticket first = slot->ticket;
    ticket_give(&table, slot);
    assert_null(ticket_find(&table, first));
    struct ticket_slot *again = ticket_take(&table);
    assert_ptr_equal(again, slot);
    assert_int_not_equal(again->ticket, first);
    assert_null(ticket_find(&table, first));
}

static void numbers_that_are_no_tickets_are_unknown(void **state)
{
    static const mok_ticket bad[] = { 0, 1, 63, UINT64_MAX, (mok_ticket)1 << 63 };
    (void)state;
    struct ticket_slot *slot = ticket_take(&table);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        assert_null(ticket_find(&table, bad[i]));
    assert_null(ticket_find(&table, slot->ticket ^ 1));
    assert_null(ticket_find(&table, slot->ticket + ((mok_ticket)1 << TICKET_DEVICE_BITS)));
    assert_null(ticket_find(&table, slot->ticket + ((mok_ticket)1 << (TICKET_DEVICE_BITS + TICKET_SLOT_BITS))));
}

static void a_slot_that_is_taken_again_has_forgotten_everything(void **state)
{
    (void)state;
    struct ticket_slot *slot = ticket_take(&table);
    slot->unwanted = true;
    slot->group = 5;
    slot->opcode = MOK_OP_CANCEL;
    slot->cqe.result = -1;
    slot->state = TICKET_DONE;
    ticket_give(&table, slot);
    slot = ticket_take(&table);
    assert_false(slot->unwanted);
    assert_int_equal(slot->group, 0);
    assert_int_equal(slot->opcode, MOK_OP_NOP);
    assert_int_equal(slot->cqe.result, 0);
    assert_int_equal(slot->state, TICKET_FLYING);
}

static void a_hundred_thousand_tickets_in_random_order_are_all_different(void **state)
{
    mok_ticket held[8] = { 0 }, last = 0;
    uint32_t random = 1;
    (void)state;
    for (int i = 0; i < 100000; i++) {
        random = random * 1664525u + 1013904223u;
        mok_ticket *place = &held[random >> 29];
        if (*place) {
            struct ticket_slot *slot = ticket_find(&table, *place);
            assert_non_null(slot);
            assert_int_equal(slot->ticket, *place);
            ticket_give(&table, slot);
            last = *place;
            *place = 0;
        } else {
            struct ticket_slot *slot = ticket_take(&table);
            assert_non_null(slot);
            for (size_t k = 0; k < ARRAY_SIZE(held); k++)
                assert_int_not_equal(held[k], slot->ticket);
            assert_int_not_equal(last, slot->ticket);
            *place = slot->ticket;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_table_gives_as_many_tickets_as_it_has_slots_and_then_none, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_ticket_names_its_slot_and_its_device_and_is_not_0, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_ticket_that_was_given_back_is_unknown_although_its_slot_is_used_again, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(numbers_that_are_no_tickets_are_unknown, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_slot_that_is_taken_again_has_forgotten_everything, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_hundred_thousand_tickets_in_random_order_are_all_different, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
