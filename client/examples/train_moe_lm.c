/* SPDX-License-Identifier: Apache-2.0 */
/*
 * train_moe_lm: a byte-level mixture-of-experts language model whose MoE layers run in mokd, with expert parallelism
 * over the rank processes of this job. An example of libmok, and the load of deploy/demo.sh.
 *
 *     options -> text -> fork one process a rank (launch.c) -> train_rank (train.c) or gradcheck_rank (gradcheck.c)
 */
#include <stdio.h>

#include "gradcheck.h"
#include "launch.h"
#include "report.h"
#include "train.h"

static int run(const struct options *options)
{
    struct model_shape shape = train_shape(options, 0);
    struct text text = { 0 };
    struct job job = { .options = options,
                       .text = &text,
                       .backend = options->engine == MOK_DEVICE_CUDA ? backend_cuda() : &backend_host };
    int code = 1;

    if (!job.backend) {
        fail(-MOK_ENOTSUP, "--engine cuda: this train_moe_lm was built without nvcc");
        return 1;
    }
    if (!options->check_gradients &&
        (text_read(options->text, options->window, options->seq, &text) < 0 || train_check(options, &text) < 0)) {
        text_free(&text);
        return 1;
    }
    if (comm_create(options->ranks, model_dense_count(&shape), train_board_words(options), &job.comm) == 0)
        code = launch(options->ranks, options->job, job.comm, options->check_gradients ? gradcheck_rank : train_rank,
                      &job);
    comm_destroy(job.comm);
    text_free(&text);
    return code;
}

int main(int argc, char **argv)
{
    struct options options;
    int rc = options_parse(argc, argv, &options);

    if (rc < 0)
        return 2;
    return rc > 0 ? 0 : run(&options);
}
