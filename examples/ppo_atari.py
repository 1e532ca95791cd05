"""PPO's update of a Nature-CNN on Atari frames, captured by `braze.capture`.

    python examples/ppo_atari.py [--smoke | --compare]

The update is that of CleanRL's and LeanRL's Atari files: frames of uint8, two heads, the clipped
objective, entropy, a clipped value loss, Adam, a clipped norm, minibatches of 256 out of a rollout
in device memory. No emulator is needed: the frames are synthetic, and what is worth doing in one of
them is to be read from its pixels.

Papers: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017); V. Mnih et al.,
"Human-level control through deep reinforcement learning" (Nature, 2015).
"""

import torch
from loop import Loop, main, rate_of, set_rate
from torch import nn
from torch.nn import functional as F

import braze

ACTIONS, EPOCHS = 6, 4
CLIP, ENTROPY, VALUE, MAX_NORM, RATE = 0.1, 0.01, 0.5, 0.5, 2.5e-4


def layer(module, gain=2**0.5):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer(nn.Linear(512, ACTIONS), 0.01)
        self.critic = layer(nn.Linear(512, 1), 1.0)

    def forward(self, images):
        hidden = self.body(images)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


def images_of(frames):
    """As the network takes them, from frames of uint8."""
    return (frames / 255.0).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def play(agent, steps, device):
    """A rollout as the update takes it, its advantages those of the synthetic task: the action to
    take is where the frames are bright."""
    best = torch.randint(ACTIONS, (steps,), device=device)
    frames = torch.randint(64, (steps, 4, 84, 84), device=device)
    columns = torch.arange(84, device=device) * ACTIONS // 84
    bright = (columns == best[:, None])[:, None, None]
    frames = (frames + 128 * bright).to(torch.uint8)
    logits, values = zip(*(agent(images_of(f)) for f in frames.split(256)), strict=True)
    logits, values = torch.cat(logits), torch.cat(values)
    actions = torch.multinomial(logits.softmax(1), 1).squeeze(1)
    returns = (actions == best).float()
    chosen = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
    return {
        "frames": frames,
        "actions": actions,
        "log_probabilities": chosen,
        "advantages": returns - values,
        "returns": returns,
        "values": values,
    }


def build(device, smoke=False, stock=False):
    batch_size, steps = (32, 128) if smoke else (256, 8192)
    torch.manual_seed(1)
    agent = Agent().to(device, memory_format=torch.channels_last)
    rollout = play(agent, steps, device)
    settings = {"lr": rate_of(RATE, device, stock), "eps": 1e-5}
    if stock:
        settings |= {"fused": True, "capturable": device == "cuda"}
        optimizer = torch.optim.Adam(agent.parameters(), **settings)
    else:
        agent = braze.convert(agent)
        optimizer = braze.optim.Adam(agent.parameters(), **settings, max_grad_norm=MAX_NORM)

    def minibatch(frames, indices, *others):
        return images_of(frames[indices]), *(tensor[indices] for tensor in others)

    def losses(logits, values, actions, old, advantages, returns, old_values):
        log_probabilities = logits.log_softmax(1)
        new = log_probabilities.gather(1, actions[:, None]).squeeze(1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(1).mean()
        ratio = (new - old).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy_loss = torch.max(-advantages * ratio, -advantages * clipped).mean()
        near = old_values + (values - old_values).clamp(-CLIP, CLIP)
        errors = torch.max((values - returns) ** 2, (near - returns) ** 2)
        value_loss = 0.5 * errors.mean()
        kl = ((ratio - 1) - (new - old)).mean()
        loss = policy_loss - ENTROPY * entropy + VALUE * value_loss
        # Detached: the compiled backward would be given zeros for their gradients.
        return loss, *(part.detach() for part in (policy_loss, value_loss, entropy, kl))

    if device == "cuda" and not stock:  # the network is braze's, what surrounds it Inductor's
        minibatch, losses = torch.compile(minibatch), torch.compile(losses)

    def objective(indices, frames, *others):
        images, *others = minibatch(frames, indices, *others)
        return losses(*agent(images), *others)

    if stock:
        objective = torch.compile(objective)

    def update(indices):
        """One minibatch of the rollout, which a new one is copied into."""
        loss, *parts = objective(indices, *rollout.values())
        optimizer.zero_grad()
        loss.backward()
        if stock:
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
        optimizer.step()
        return loss, *parts

    updates = EPOCHS * steps // batch_size * (2 if smoke else 1)
    order = torch.cat(
        [torch.randperm(steps, device=device) for _ in range(updates * batch_size // steps)]
    )

    def before(i):
        set_rate(optimizer.param_groups[0], RATE * (1 - i / updates))

    @torch.no_grad()
    def report():
        logits, _ = agent(images_of(rollout["frames"][:256]))
        bright = rollout["frames"][:256].float().mean((1, 2))
        best = F.adaptive_max_pool1d(bright, ACTIONS).argmax(1)
        return f"({(logits.argmax(1) == best).float().mean():.0%} of the actions are the best)"

    return Loop(update, lambda i: (order[i * batch_size :][:batch_size],), before, updates, report)


if __name__ == "__main__":
    main(build, __doc__)
