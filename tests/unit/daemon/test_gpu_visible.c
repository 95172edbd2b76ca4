/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA_VISIBLE_DEVICES of workers, where the driver is played by files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu_visible.h"

static char root[] = "/tmp/mok-gpus-XXXXXX";

static void gpu(const char *address, const char *uuid)
{
    char command[512];

    snprintf(command, sizeof(command),
             "d=%s/proc/driver/nvidia/gpus/%s && mkdir -p $d && printf 'Model: \\t\\t NVIDIA\\nIRQ:   \\t\\t 7\\nGPU "
             "UUID: \\t "
             "%s\\nDevice Minor: \\t 0\\n' >$d/information",
             root, address, uuid);
    assert_int_equal(system(command), 0);
}

static int begin(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(root));
    gpu("0000:9f:00.0", "GPU-b6ba67ae-3e35-733e-af67-576b8b327d27");
    gpu("0000:0f:00.0", "GPU-c314a989-ee96-20ab-6d59-5b103195decd");
    gpu("0001:01:00.0", "GPU-\?\?\?\?\?\?\?\?-\?\?\?\?-\?\?\?\?-\?\?\?\?-\?\?\?\?\?\?\?\?\?\?\?\?");
    return 0;
}

static int end(void **state)
{
    char command[64];

    (void)state;
    snprintf(command, sizeof(command), "rm -rf %s", root);
    return system(command);
}

static const char *visible(uint32_t sharing, uint32_t mps, uint32_t cuda, const char *below)
{
    static char text[MOKD_GPU_VISIBLE_MAX];
    static struct mokd_config config;
    struct mokd_device_config device = { .kind = MOK_DEVICE_CUDA, .cuda = cuda };

    config.sharing = sharing;
    config.mps = mps;
    mokd_gpu_visible(&config, &device, below, text);
    return text;
}

static void in_time_slices_a_gpu_goes_by_its_number(void **state)
{
    (void)state;
    assert_string_equal(visible(MOKD_SHARING_SLICES, MOKD_MPS_SITE, 1, root), "1");
}

static void under_a_control_daemon_of_mokds_own_every_gpu_is_number_0(void **state)
{
    (void)state;
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_OWN, 0, root), "0");
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_OWN, 1, root), "0");
}

static void under_a_sites_control_daemon_a_gpu_goes_by_its_uuid_in_the_order_of_addresses(void **state)
{
    (void)state;
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_SITE, 0, root), "GPU-c314a989-ee96-20ab-6d59-5b103195decd");
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_SITE, 1, root), "GPU-b6ba67ae-3e35-733e-af67-576b8b327d27");
}

static void without_a_uuid_it_goes_by_its_number(void **state)
{
    (void)state;
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_SITE, 2, root), "2");
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_SITE, 7, root), "7");
    assert_string_equal(visible(MOKD_SHARING_MPS, MOKD_MPS_SITE, 1, "/nonexistent"), "1");
}

static void a_worker_without_a_gpu_sees_none(void **state)
{
    struct mokd_device_config device = { .kind = MOK_DEVICE_HOST };
    static struct mokd_config config;
    char text[MOKD_GPU_VISIBLE_MAX];
    (void)state;

    mokd_gpu_visible(&config, &device, root, text);
    assert_string_equal(text, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_time_slices_a_gpu_goes_by_its_number),
        cmocka_unit_test(under_a_control_daemon_of_mokds_own_every_gpu_is_number_0),
        cmocka_unit_test(under_a_sites_control_daemon_a_gpu_goes_by_its_uuid_in_the_order_of_addresses),
        cmocka_unit_test(without_a_uuid_it_goes_by_its_number),
        cmocka_unit_test(a_worker_without_a_gpu_sees_none),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
